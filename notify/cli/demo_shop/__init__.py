"""`notify demo`: a shop whose processes are killed all the time, and the proof that no order was lost or doubled."""
