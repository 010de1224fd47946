"""Who may do what: principals by token, certificate or identity provider, and their rights per topic and group."""

from notify.server.access.gate import Access
from notify.server.access.principal import EVERYONE, Principal
from notify.server.access.rights import Right, parse_rights

__all__ = ["EVERYONE", "Access", "Principal", "Right", "parse_rights"]
