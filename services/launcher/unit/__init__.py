"""What runs on a machine that was rented for a replica: it watches over the replica there."""
