"""The administrative writes, each declared once: fields, bounds, warning, sentences, and the workers that do it.

Admin routes, the console's forms, the commands and the fan-out to workers are made from these declarations. Needs no
library of a server.
"""
