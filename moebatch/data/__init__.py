"""Users' rows: reading them, turning them into requests, writing what came of them."""
