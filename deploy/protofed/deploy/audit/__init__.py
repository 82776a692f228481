"""Reading and verifying the audit logs of server and sites."""
