"""Long work of the administrator: its records, and what runs beside everything else until it is done."""
