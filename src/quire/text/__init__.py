"""Between text and tokens: tokenizers, chat templates, incremental detokenising. Knows no engine and no device."""
