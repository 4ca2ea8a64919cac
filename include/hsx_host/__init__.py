"""The program that hsx runs on the GPU host: servers, disks, data sets. It knows nothing of Airflow."""

__version__ = "0.1.0"
