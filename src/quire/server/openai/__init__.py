"""The OpenAI API: its schema, how requests are parsed and how answers are formatted. Knows no transport."""
