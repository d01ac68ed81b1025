"""Agreement of ranks on finished KV transfers: every rank says how its part ended, and all apply the same outcome in
the same order.

`agreement.py` has the interface and its words, `outcome.py` the outcomes and their dominance, `reducer.py` the votes of
one round, `wire.py` the packets, `transport.py` what carries them. Implementations: `ordered.py` (asynchronous),
`blocking.py` (collectives), `local_only.py` (no agreement, for measurements).
"""
