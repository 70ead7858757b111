#!/usr/bin/env bash
# Makes vega.js.gz again from the packages of the npm registry; needs npm, node and gzip, and the network.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
npm pack --silent vega@6.2.0 vega-lite@5.21.0 vega-interpreter@2.3.2
for package in vega-6.2.0 vega-lite-5.21.0 vega-interpreter-2.3.2; do
  mkdir "$package"
  tar -xzf "$package.tgz" -C "$package" --strip-components=1
done
{
  cat vega-6.2.0/build/vega.min.js
  grep -v '^//# sourceMappingURL' vega-lite-5.21.0/build/vega-lite.min.js
  # The interpreter is published as a module only.
  echo '(() => {'
  sed -e "s/^import \(.*\) from 'vega-util';/const \1 = vega;/" \
    -e '/sourceMappingURL/d' \
    -e 's/^export { expression as expressionInterpreter };/globalThis.vegaInterpreter = expression;/' \
    vega-interpreter-2.3.2/build/vega-interpreter.js
  echo '})();'
} > vega.js
gzip -9 --no-name --stdout vega.js > "$here/vega.js.gz"
cp vega-6.2.0/LICENSE "$here/LICENSE"
sha256sum vega.js
