"""Transport over memory that processes of one machine share."""
