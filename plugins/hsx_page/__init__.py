"""The page "Hidden states": what tasks publish, read from Airflow's database by the api-server. No SSH."""
