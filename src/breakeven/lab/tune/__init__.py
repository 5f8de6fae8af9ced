"""`breakeven tune`: a search over shapes of speculation, and a confirmation that shares no block or prompt with it."""
