"""The gate: the site's policy, its approvals, and the checks that each update passes before it leaves."""
