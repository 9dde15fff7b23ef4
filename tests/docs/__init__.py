"""The site says what the code says: its pages, tables and messages, and the demo runs."""
