"""Operations on rows: each one function in front of the compiled core."""
