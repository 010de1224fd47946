"""Tokens, keys and documents that no provider makes: whatever a library raises on them is a refusal with our words, and
one odd key does not keep the others out."""

from __future__ import annotations

import json
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from notify.errors import Unauthorized, Unavailable
from notify.runtime import faults
from notify.server.access import oidc
from notify.server.access.oidc import ALGORITHMS, MOST_KEY_BITS, Provider
from notify.testing import InMemoryServer
from tests.support.clock import PATIENCE_SECONDS
from tests.support.http import ask
from tests.support.issuer import Issuer, signed

PRIVATE: dict[str, Any] = {
    "RSA": rsa.generate_private_key(65537, 2048),
    "P-256": ec.generate_private_key(ec.SECP256R1()),
    "P-384": ec.generate_private_key(ec.SECP384R1()),
    "P-521": ec.generate_private_key(ec.SECP521R1()),
    "Ed25519": ed25519.Ed25519PrivateKey.generate(),
    "Ed448": ed448.Ed448PrivateKey.generate(),
}
SIGNED_WITH = {name: kind for kind, names in reversed(ALGORITHMS.items()) for name in names}
"""A kind of key for each algorithm."""


def published(kind: str, **fields: Any) -> dict[str, Any]:
    algorithm = jwt.algorithms.get_default_algorithms()[ALGORITHMS[kind][0]]
    key: dict[str, Any] = algorithm.to_jwk(PRIVATE[kind].public_key(), as_dict=True)
    return key | {"kid": kind} | fields


@pytest.fixture
def provider(issuer: Issuer, monkeypatch: pytest.MonkeyPatch) -> Provider:
    """A provider with a key of each kind."""
    monkeypatch.setattr(oidc, "FETCH_SECONDS", PATIENCE_SECONDS)
    issuer.keys = {"keys": [published(kind) for kind in PRIVATE]}
    made = Provider(issuer.url, "notify", "notify_rights")
    made.fetch()
    return made


@pytest.mark.parametrize("algorithm", [*SIGNED_WITH, "HS256", "ES256K", "PS384", "none"])
@pytest.mark.parametrize("kind", PRIVATE)
def test_an_algorithm_of_another_kind_of_key_is_refused(
    issuer: Issuer, provider: Provider, kind: str, algorithm: str
) -> None:
    """12 of 21 such pairs were answered with 500, before anybody knew who had sent them."""
    fits = algorithm in ALGORITHMS[kind]
    signing = PRIVATE[kind if fits else SIGNED_WITH.get(algorithm, "RSA")]
    with_algorithm = algorithm if algorithm in SIGNED_WITH else "RS256"
    token = signed({"alg": algorithm, "kid": kind}, issuer.claims(), signing, with_algorithm)
    if fits:
        assert provider.verify(token).subject == "person"
        return
    with pytest.raises(Unauthorized, match="the bearer token is not valid"):
        provider.verify(token)


ODD_NUMBERS = ["1e308", "1e300", "NaN", "Infinity", "-Infinity", "-1e308", "1" + "0" * 400, "1" + "0" * 5000, '"soon"',
               "true", "null", "[]", "{}", '"1e308"', "[" * 5000]  # fmt: skip


@pytest.mark.parametrize("number", ODD_NUMBERS, ids=lambda text: text[:10] + str(len(text)))
@pytest.mark.parametrize("claim", ["exp", "nbf", "iat"])
def test_a_claim_of_time_that_is_not_a_time_is_refused(
    issuer: Issuer, provider: Provider, claim: str, number: str
) -> None:
    """A signed `exp` of 1e308 was answered with 500, as was an unsigned one of 400 digits."""
    fields = {name: json.dumps(value) for name, value in issuer.claims().items()} | {claim: number}
    claims = "{" + ", ".join(f'"{name}": {value}' for name, value in fields.items()) + "}"
    token = signed({"alg": "ES256", "kid": "P-256"}, claims, PRIVATE["P-256"], "ES256")
    try:
        found = provider.verify(token)
    except Unauthorized:
        return
    assert claim != "exp" and found.expires_at < 1e11, "only a time that is not asked for may be odd"


ODD_CLAIMS: list[dict[str, Any]] = [
    {"sub": ["person"]}, {"sub": 7}, {"sub": ""}, {"sub": "x" * 300}, {"sub": "\ud800"}, {"sub": "a\0b"}, {"sub": None},
    {"aud": {"notify": 1}}, {"aud": [["notify"]]}, {"aud": [{}]}, {"aud": [None, "notify"]}, {"aud": 7},
    {"iss": ["x"]}, {"iss": {}}, {"iss": 1e308}, {"jti": [1]}, {"nbf": 1 << 40},
    {"notify_rights": {"view": 1}}, {"notify_rights": [["view"]]}, {"notify_rights": 1}, {"notify_rights": [None]},
]  # fmt: skip


@pytest.mark.parametrize("odd", ODD_CLAIMS, ids=lambda odd: repr(odd)[:40])
def test_an_odd_claim_is_refused_or_plain(issuer: Issuer, provider: Provider, odd: dict[str, Any]) -> None:
    claims = issuer.claims() | odd
    token = signed({"alg": "EdDSA", "kid": "Ed25519"}, claims, PRIVATE["Ed25519"], "EdDSA")
    if odd == {"aud": [None, "notify"]}:
        with pytest.raises(Unauthorized):  # PyJWT wants texts only
            provider.verify(token)
        return
    with pytest.raises(Unauthorized):
        provider.verify(token)
        raise AssertionError(provider.verify(token))


ODD_HEADERS: list[Any] = [
    {"alg": "ES256", "kid": ["P-256"]}, {"alg": "ES256", "kid": 7}, {"alg": "ES256", "kid": None}, {"alg": "ES256"},
    {"alg": ["ES256"], "kid": "P-256"}, {"alg": {"ES256": 1}, "kid": "P-256"}, {"alg": None, "kid": "P-256"},
    {"alg": "ES256", "kid": "P-256", "crit": ["x"]}, {"alg": "ES256", "kid": "P-256", "b64": False},
    {"alg": "ES256", "kid": "P-256", "crit": 7}, {"alg": "ES256", "kid": "P-256", "crit": {"b64": 1}},
    [], ["ES256"], "\"ES256\"", "7", "null", "{", "[" * 10_000, "\ufeff{}", '{"alg": 1' + "0" * 5000 + "}",
]  # fmt: skip


@pytest.mark.parametrize("header", ODD_HEADERS, ids=lambda header: str(header)[:40])
def test_an_odd_header_is_refused(issuer: Issuer, provider: Provider, header: Any) -> None:
    with pytest.raises(Unauthorized, match="the bearer token is not valid"):
        provider.verify(signed(header, issuer.claims(), PRIVATE["P-256"], "ES256"))


def test_a_signature_of_any_length_is_refused(issuer: Issuer, provider: Provider) -> None:
    for kind, names in ALGORITHMS.items():
        head, claims, _ = signed({"alg": names[0], "kid": kind}, issuer.claims(), PRIVATE[kind], names[0]).split(".")
        for proof in ("", "AA", "A" * 63, "A" * 64, "A" * 86, "A" * 10_000, "é", "=", "A=A"):
            with pytest.raises(Unauthorized):
                provider.verify(f"{head}.{claims}.{proof}")


ODD_KEYS: list[Any] = [
    None, 7, "key", [], {}, {"kty": "RSA"}, {"kty": ["RSA"]}, {"kty": {}}, {"kty": "EC", "crv": "P-256"},
    {"kty": "EC", "crv": ["P-256"], "kid": "a"}, {"kty": "EC", "crv": "secp256k1", "kid": "a", "x": "AA", "y": "AA"},
    {"kty": "oct", "k": "c2VjcmV0", "kid": "secret"}, {"kty": "RSA", "n": 7, "e": "AQAB", "kid": "a"},
    {"kty": "RSA", "n": "AA", "e": "AQAB", "kid": "a"}, {"kty": "RSA", "n": "!!!", "e": [], "kid": "a"},
    {"kty": "RSA", "n": "A" * 50_000, "e": "AQAB", "kid": "a"}, {"kty": "RSA", "n": "AQAB", "e": "AA", "kid": "a"},
    {"kty": "EC", "crv": "P-256", "x": "AQ", "y": "AQ", "kid": "a"},
    {"kty": "EC", "crv": "P-256", "x": "A" * 43, "y": "A" * 43, "kid": "a"},
    {"kty": "OKP", "crv": "Ed25519", "x": "AQ", "kid": "a"}, {"kty": "OKP", "crv": "X25519", "x": "A" * 43, "kid": "a"},
]  # fmt: skip


def test_one_odd_key_does_not_keep_the_others_out(issuer: Issuer, provider: Provider) -> None:
    """An EC key off its curve, a number for a text or a list for an object kept all keys from being read."""
    faults_before = faults.count()
    good = published("P-256")
    others = [
        good | {"kid": 7},
        good | {"kid": ["x"]},
        good | {"kid": "encrypts", "use": "enc"},
        good | {"kid": "of another algorithm", "alg": "ES384"},
        good | {"kid": "of no signature", "alg": ["ES256"]},
    ]
    issuer.keys = {"keys": [*ODD_KEYS, *others, good]}
    provider.fetch()
    assert provider.verify(signed({"alg": "ES256", "kid": "P-256"}, issuer.claims(), PRIVATE["P-256"], "ES256"))
    assert list(provider._keys) == ["P-256"]
    issuer.keys = {"keys": [good | {"kid": "x"}, published("RSA", alg="RS384")]}
    provider.fetch()
    for name in ("RS256", "RS384", "PS256"):
        token = signed({"alg": name, "kid": "RSA"}, issuer.claims(), PRIVATE["RSA"], name)
        if name == "RS384":
            assert provider.verify(token)
        else:
            with pytest.raises(Unauthorized, match="algorithm"):  # the key names its one algorithm
                provider.verify(token)
    assert faults.count() == faults_before


def test_a_key_that_would_be_slow_to_verify_with_is_not_used(issuer: Issuer, provider: Provider) -> None:
    modulus = jwt.utils.to_base64url_uint((1 << (MOST_KEY_BITS + 64)) + 1).decode()
    issuer.keys = {"keys": [{"kty": "RSA", "n": modulus, "e": "AQAB", "kid": "large"}]}
    provider.fetch()
    assert not provider.has_key("large")


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"7", b'"x"', b"null", b"{", b"[" * 100_000, b'{"keys": {}}', b'{"keys": 7}', b"{}", b"\xff\xfe\x00",
     b'{"keys": [' + b"1" * 5000 + b"]}", b'{"x": "' + b"y" * (2 << 20) + b'"}'],
    ids=lambda content: repr(content[:12]) + str(len(content)),
)  # fmt: skip
def test_a_malformed_document_of_a_provider_is_unavailable(issuer: Issuer, provider: Provider, content: bytes) -> None:
    """Whatever it holds, of any size: at most a mebibyte of it is read, and the keys of before stay."""
    issuer.keys = content
    with pytest.raises(Unavailable):
        provider.fetch()
    assert provider.has_key("RSA")
    kept, issuer.document = issuer.document, content
    try:
        with pytest.raises(Unavailable):
            provider.fetch()
    finally:
        issuer.document = kept


def test_a_server_refuses_odd_tokens_in_its_own_words(issuer: Issuer, provider: Provider) -> None:
    faults_before = faults.count()
    with InMemoryServer(access=True, oidc_issuer=issuer.url) as server:
        for token in (
            signed({"alg": "RS256", "kid": "P-256"}, issuer.claims(), PRIVATE["RSA"], "RS256"),
            signed({"alg": "ES256", "kid": "RSA"}, issuer.claims(), PRIVATE["P-256"], "ES256"),
            signed({"alg": "ES256", "kid": "P-256"}, issuer.claims() | {"exp": 1e308}, PRIVATE["P-256"], "ES256"),
            signed({"alg": "ES256", "kid": "P-256"}, issuer.claims() | {"exp": 10**400}, PRIVATE["P-256"], "ES256"),
        ):
            for method, path in (("GET", "/v1/admin/topics"), ("POST", "/v1/messages"), ("GET", "/topics")):
                status, problem = ask(server.url, method, path, None if method == "GET" else {}, token)
                assert (status, problem["code"]) == (401, "unauthorized"), problem
    assert faults.count() == faults_before


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
    | st.sampled_from(["ES256", "RS256", "EdDSA", "notify", "P-256", "RSA", "none"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3), max_leaves=6,
)  # fmt: skip
HEADER = st.dictionaries(st.sampled_from(["alg", "kid", "typ", "crit", "b64", "zip", "jku"]), JSON)
CLAIMS = st.dictionaries(
    st.sampled_from(["iss", "aud", "sub", "exp", "nbf", "iat", "jti", "notify_rights"]), JSON, max_size=8
)


@pytest.mark.long
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(header=HEADER | JSON, claims=CLAIMS | JSON, is_whole=st.booleans())
def test_no_token_brings_anything_but_a_refusal(issuer: Issuer, provider: Provider, header: Any, claims: Any,
                                                is_whole: bool) -> None:  # fmt: skip
    if is_whole and isinstance(claims, dict):
        claims = issuer.claims() | claims
    if is_whole and isinstance(header, dict):
        header = {"alg": "ES256", "kid": "P-256"} | header
    try:
        found = provider.verify(signed(header, claims, PRIVATE["P-256"], "ES256"))
    except Unauthorized:
        return
    assert found.subject.isprintable() and found.expires_at < 1e12
