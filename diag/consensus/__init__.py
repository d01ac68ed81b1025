"""`atom trace-consensus`: who waited for whom. Reads what ranks recorded of their agreement, or of their collectives,
and says whether the wait is there, for which rank, and what that rank did meanwhile.

`model.py` has the words; `trace_file.py`, `kineto.py` and `flight_recorder.py` read one rank's file each, `sources.py`
whole recordings; `waits.py`, `lifecycle.py`, `safety.py` and `stages.py` measure one of them, `outcome.py` compares the
arms and `localise.py` gives the verdict; `document.py` has everything as JSON, `perfetto.py` as a timeline.
"""
