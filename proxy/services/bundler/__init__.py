"""The bundler, one service in several rooms: `routes` says what its methods cost, `desk` checks and sends, `recall` finds what
a bundler has forgotten, `inclusions` keeps the record true, `forgetting` keeps it small."""
