"""Hotel bookings: book a room, cancel a booking."""
