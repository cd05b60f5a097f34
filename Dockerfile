# A container with Crius and your folder as /work:
#   make dist
#   docker build -t crius .
#   docker run --rm -it --gpus all -v "$PWD:/work" crius train --data.path my_books
# A CPU: --build-arg CRIUS_TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu", and no --gpus
FROM python:3.12
ARG CRIUS_TORCH=torch==2.13.0
WORKDIR /tmp/crius
COPY dist/*.whl ./
RUN pip install --no-cache-dir $CRIUS_TORCH
RUN pip install --no-cache-dir "$(ls *.whl)[standard]" && rm *.whl
WORKDIR /work
ENTRYPOINT ["crius"]
CMD ["--help"]
