"""`notify demo`: a shop whose processes are killed all the time, and the proof that nothing was lost or doubled."""
