"""Between MLA's projections and its core attention: absorption, rotary embedding, keys and values (imports no torch)."""
