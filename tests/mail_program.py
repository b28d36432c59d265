"""An SMTP server as a program, for tests on a booted host: STARTTLS and a login are required, mails go to a directory.

python -m tests.mail_program CERTIFICATE KEY USER PASSWORD MAILDIR
"""

from __future__ import annotations

import asyncio
import ssl
import sys
from pathlib import Path
from typing import Any

from aiosmtpd.handlers import Mailbox
from aiosmtpd.smtp import SMTP, AuthResult, LoginPassword

PORT = 587


async def main(cert: str, key: str, user: str, password: str, directory: str) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)

    def is_known(_server: Any, _session: Any, _envelope: Any, _mechanism: str, given: Any) -> AuthResult:
        # `handled`: whether the reply was sent already. A wrong password would get none.
        return AuthResult(success=given == LoginPassword(user.encode(), password.encode()), handled=False)

    def accepted() -> SMTP:
        return SMTP(
            Mailbox(Path(directory)),
            tls_context=context,
            require_starttls=True,
            authenticator=is_known,
            auth_required=True,
        )

    server = await asyncio.get_running_loop().create_server(accepted, "127.0.0.1", PORT)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
