"""The roles of people in an account, and what each may do.

Each operation of a signed-in person names the permission that it needs, as `x-permission` in the API spec. One that changes an
account needs more than `view`, so a role without `manage` and `administer` changes nothing.
"""

from __future__ import annotations

from typing import Literal

# view: read the account, without secrets. profile: the person's own password, second factor, address and sessions.
# manage: keys, webhooks, alerts and gas policies. administer: members, and the account itself.
Permission = Literal["view", "profile", "manage", "administer"]
# A visitor is an operator who looks at the account.
Role = Literal["owner", "developer", "read-only", "visitor"]

PERMISSIONS: dict[Role, frozenset[Permission]] = {
    "owner": frozenset({"view", "profile", "manage", "administer"}),
    "developer": frozenset({"view", "profile", "manage"}),
    "read-only": frozenset({"view", "profile"}),
    "visitor": frozenset({"view"}),
}


def refusal(role: Role, needed: Permission) -> str:
    """Why the role does not have the permission; empty if it has."""
    if needed in PERMISSIONS[role]:
        return ""
    if role == "visitor":
        return "operators can only look at an account"
    return f"your role ({role}) does not allow this: ask an owner of the account"
