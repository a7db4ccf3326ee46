# An image with dpvision, its kernels and CPU PyTorch; see docs/guides/installing.md.
# PIP_EXTRA_INDEX_URL is the address of PyTorch's index of CPU wheels. Without it, PyTorch comes with CUDA (5 GB).
FROM python:3.12-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY pyproject.toml setup.py README.md LICENSE ./
COPY src src
RUN DPVISION_BUILD_KERNELS=1 pip wheel --no-cache-dir --no-deps -w /wheels .

FROM python:3.12-slim
ARG PIP_EXTRA_INDEX_URL
COPY constraints.txt /tmp/constraints.txt
COPY --from=build /wheels /tmp/wheels
RUN pip install --no-cache-dir -c /tmp/constraints.txt /tmp/wheels/*.whl && rm -r /tmp/wheels
RUN useradd --create-home --uid 1000 dpvision && install -d -o dpvision /work
USER dpvision
WORKDIR /work
ENTRYPOINT ["dpvision"]
CMD ["--help"]
