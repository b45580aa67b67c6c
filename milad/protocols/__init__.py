"""One file per API: JSON to Turn, events to the vendor's stream and body."""
