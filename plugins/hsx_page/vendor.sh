#!/bin/sh
# Copies the libraries of package-lock.json into static/vendor, with their licences. Needs npm.
set -eu
cd "$(dirname "$0")"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp package.json package-lock.json "$work"
npm ci --prefix "$work" --ignore-scripts --no-audit --no-fund --silent
from=$work/node_modules to=static/vendor
rm -rf "$to" && mkdir -p "$to"
# the source maps that the last lines name are not shipped
sed '/^\/\/# sourceMappingURL/d' "$from/chart.js/dist/chart.umd.min.js" > "$to/chart.umd.min.js"
sed '/^\/\/# sourceMappingURL/d' "$from/lit-html/lit-html.js" > "$to/lit-html.js"
cp "$from/chart.js/LICENSE.md" "$to/chart.LICENSE.md"
cp "$from/lit-html/LICENSE" "$to/lit-html.LICENSE"
(cd "$to" && sha256sum -- * | grep -v SHA256SUMS > "$work/sums" && mv "$work/sums" SHA256SUMS)
