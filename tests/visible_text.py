"""Characters of which names may consist."""

from hypothesis import strategies as st

VISIBLE = st.characters(exclude_categories=["Cc", "Cf", "Cs", "Zl", "Zp"])
