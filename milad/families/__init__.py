"""One file per model family: rendering and parsing side by side."""
