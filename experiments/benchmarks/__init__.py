"""Time and memory of the library's parts."""
