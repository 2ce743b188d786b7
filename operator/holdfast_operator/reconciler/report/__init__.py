"""Reports to people: conditions, reasons of ends, recoveries, losses."""
