"""The bundler: `bundler_policies` prices its methods, `bundler_guard` checks and sends operations, `lookup` finds operations
that a bundler no longer has, `inclusions` records which operations were executed, and `cleanup` removes old records."""
