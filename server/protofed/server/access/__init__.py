"""Who may call: certificates, credentials, authorization and rate limits."""
