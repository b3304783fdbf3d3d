"""The OpenAI API: its schema, how requests are parsed and how responses are formatted. Refuses to know: transports."""
