"""The embedded default: two environments, a small real model, a loopback SSH server, and Airflow beside them."""
