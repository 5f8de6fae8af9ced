"""The lab: an honest A/B of server configurations under load. Knows servers only through HTTP and processes."""
