# Airflow with hsx in it, for docker-compose.yaml and for Kubernetes. Profiles, keys and connections stay outside.
FROM apache/airflow:3.3.2

# requirements.txt pins Airflow itself too, so that pip can't move the image's to another version.
COPY requirements.txt /opt/hsx/requirements.txt
RUN pip install --no-cache-dir -r /opt/hsx/requirements.txt

# The SSH hooks look for known hosts in the login's own folder: it leads to the mounted one.
RUN mkdir -p "${HOME}/.ssh" && ln -s /opt/airflow/secrets/known_hosts "${HOME}/.ssh/known_hosts"

COPY --chown=50000:0 dags /opt/airflow/dags
COPY --chown=50000:0 plugins /opt/airflow/plugins
COPY --chown=50000:0 include /opt/airflow/include

ENV PYTHONPATH=/opt/airflow/plugins:/opt/airflow/include \
    HSX_PROFILES=/opt/airflow/profiles \
    AIRFLOW__CORE__LOAD_EXAMPLES=False \
    AIRFLOW__LOGGING__NAMESPACE_LEVELS=asyncssh=WARNING

# An image in which a DAG can't be imported is none. In a folder of its own: Airflow writes a configuration with new
# keys there, which must not become part of the image.
RUN set -e; export AIRFLOW_HOME=/tmp/build; for dag in /opt/airflow/dags/*.py; do python "$dag"; done; rm -rf /tmp/build
