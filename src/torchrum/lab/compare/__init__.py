"""Compare recurrent layers on a user's own data."""
