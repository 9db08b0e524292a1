"""Memory that processes of one machine share."""
