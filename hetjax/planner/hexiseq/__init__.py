"""HexiSeq: one long sequence over unlike devices, uneven in tokens and in heads (2026)."""
