"""A Kafka node with TLS, SASL SCRAM and ACLs: nobody may do anything that was not granted."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlencode

from confluent_kafka import KafkaException
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from notify.kafka.rights import Need, Needs
from notify.testing.ports import free_port
from tests.support.authority import Authority
from tests.support.clock import eventually
from tools.kafka_cluster import KafkaCluster, NodeSettings

ADMIN = "admin"
CALL_SECONDS = 30.0
LOGIN_SECONDS = 2.0
PASSWORD = "p%={}"
"""The password of every user, with signs that a URL and a file of settings have to keep as they are."""


@dataclass(frozen=True, slots=True)
class Grant:
    """Operations on a resource: a topic, group, transactional id or cluster. A name that ends with `*` is the
    beginning of names, `*` stands for all."""

    kind: str
    name: str
    operations: tuple[str, ...]

    def bindings(self, user: str) -> list[AclBinding]:
        kind = ResourceType.BROKER if self.kind == "cluster" else ResourceType[self.kind.replace(" ", "_").upper()]
        begins = self.name.endswith("*") and self.name != "*"
        pattern = ResourcePatternType.PREFIXED if begins else ResourcePatternType.LITERAL
        name = "kafka-cluster" if self.kind == "cluster" else self.name[:-1] if begins else self.name
        return [
            AclBinding(kind, name, pattern, f"User:{user}", "*", AclOperation[operation], AclPermissionType.ALLOW)
            for operation in self.operations
        ]


class SecuredKafka:
    """One node. `cluster` reaches it without TLS, as a super user."""

    def __init__(self, directory: Path) -> None:
        """Raises Unavailable where Kafka cannot run here."""
        self.directory = directory
        self.authority = Authority(directory, "authority")
        self.port = free_port()
        self.brokers = f"127.0.0.1:{self.port}"
        settings = {
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,SECURED:SASL_SSL",
            "inter.broker.listener.name": "PLAINTEXT",
            "sasl.enabled.mechanisms": "SCRAM-SHA-512",
            "listener.name.secured.scram-sha-512.sasl.jaas.config":
                "org.apache.kafka.common.security.scram.ScramLoginModule required;",
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": self.authority.issue("broker"),
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": f"User:{ADMIN};User:ANONYMOUS",
            "auto.create.topics.enable": "false",
        }  # fmt: skip
        listener = f"SECURED://{self.brokers}"
        self.cluster = KafkaCluster(directory, node_settings=NodeSettings(settings, listener, {ADMIN: PASSWORD}))
        self.cluster.start()
        self._admin = AdminClient({"bootstrap.servers": self.cluster.brokers, "log_level": 0})

    def settings(self, user: str, password: str = PASSWORD, **others: str) -> dict[str, str]:
        """A client's settings. A name in `others` has `_` for `.`."""
        return {
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "SCRAM-SHA-512",
            "sasl.username": user,
            "sasl.password": password,
            "ssl.ca.location": str(self.authority.file),
        } | {name.replace("_", "."): value for name, value in others.items()}

    def url(self, user: str, password: str = PASSWORD, **others: str) -> str:
        return f"kafka://{self.brokers}?{urlencode(self.settings(user, password, **others), quote_via=quote)}"

    def other_authority(self) -> Path:
        """The certificate of an authority that has signed nothing here."""
        return Authority(self.directory, "stranger").file

    def settings_file(self, user: str, password: str = PASSWORD) -> Path:
        """A file for NOTIFY_KAFKA_SETTINGS."""
        file = self.directory / f"{user}.properties"
        file.write_text("".join(f"{name}={value}\n" for name, value in self.settings(user, password).items()))
        return file

    # --- the administrator ------------------------------------------------------------------------------------

    def add_user(self, name: str, password: str = PASSWORD) -> None:
        """Make a user, or give one another password, and wait until the broker knows it."""
        credential = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096)
        wanted = UserScramCredentialUpsertion(name, credential, password.encode())
        self._finish(self._admin.alter_user_scram_credentials([wanted]))
        eventually(lambda: self._lets_in(name, password), f"{name} to be let in")

    def _lets_in(self, name: str, password: str) -> bool:
        client = AdminClient({"bootstrap.servers": self.brokers, "log_level": 0, **self.settings(name, password)})
        try:
            client.list_topics(timeout=LOGIN_SECONDS)
        except KafkaException:
            return False
        return True

    def user(self, needs: Needs) -> str:
        """A new user with these rights alone."""
        name = f"u{uuid.uuid4().hex[:8]}"
        self.grant(name, [self.grant_of(need) for need in needs.needs])
        self.add_user(name)  # the broker learns in this order: it knows the rights once it lets the user in
        return name

    @staticmethod
    def grant_of(need: Need) -> Grant:
        """`DescribeConfigs` is the operation DESCRIBE_CONFIGS of Kafka's client."""
        operations = tuple(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", each).upper() for each in need.operations)
        return Grant(need.kind, need.name, operations)

    def grant(self, user: str, grants: Iterable[Grant]) -> None:
        bindings = [b for grant in grants for b in grant.bindings(user)]
        if bindings:
            self._finish(self._admin.create_acls(bindings))

    def deny(self, user: str, topic: str) -> None:
        """Deny a user to read a topic."""
        refusal = AclBinding(
            ResourceType.TOPIC, topic, ResourcePatternType.LITERAL, f"User:{user}", "*", AclOperation.READ,
            AclPermissionType.DENY,
        )  # fmt: skip
        self._finish(self._admin.create_acls([refusal]))

    def withdraw(self, user: str, grant: Grant) -> None:
        self._finish(
            self._admin.delete_acls(
                [
                    AclBindingFilter(
                        b.restype, b.name, b.resource_pattern_type, b.principal, b.host, b.operation, b.permission_type
                    )
                    for b in grant.bindings(user)
                ]
            )
        )

    @staticmethod
    def _finish(asked: Mapping[object, object]) -> None:
        for answer in asked.values():
            answer.result(CALL_SECONDS)  # type: ignore[attr-defined]

    def stop(self) -> None:
        self.cluster.kill_node(0)  # quicker than an orderly end
