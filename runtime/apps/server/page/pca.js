// Places vectors in a plane: principal components by power iteration.

const ROUNDS = 500;
const ENOUGH = 1e-9; // a change of a unit vector that ends the iteration

/** Return [x, y] of each vector, and the share of the variance that the plane keeps. */
export function project(vectors) {
  const gram = center(multiply(vectors));
  const total = gram.reduce((sum, row, place) => sum + row[place], 0);
  const points = vectors.map(() => [0, 0]);
  let kept = 0;
  for (const axis of [0, 1]) {
    const { value, direction } = findLargest(gram);
    if (value <= total * 1e-12) {
      break; // all on one line, or in one place
    }
    kept += value;
    direction.forEach((part, place) => {
      points[place][axis] = part * Math.sqrt(value);
    });
    gram.forEach((row, i) => row.forEach((_, j) => (row[j] -= value * direction[i] * direction[j])));
  }
  return { points, kept: total > 0 ? kept / total : 1 };
}

/** Return how alike each two vectors are: the cosine of the angle between them. */
export function compare(vectors) {
  const products = multiply(vectors);
  const lengths = products.map((row, place) => Math.sqrt(row[place]) || 1);
  return products.map((row, i) => row.map((product, j) => product / (lengths[i] * lengths[j])));
}

/** Return the dot product of each two vectors. */
function multiply(vectors) {
  const dot = (a, b) => a.reduce((sum, part, place) => sum + part * b[place], 0);
  return vectors.map((a) => vectors.map((b) => dot(a, b)));
}

/** Return the products that the vectors would have after their mean is taken away. */
function center(products) {
  const count = products.length;
  const means = products.map((row) => row.reduce((sum, part) => sum + part, 0) / count);
  const mean = means.reduce((sum, part) => sum + part, 0) / count;
  return products.map((row, i) => row.map((part, j) => part - means[i] - means[j] + mean));
}

/** Return the largest eigenvalue of a symmetric matrix, and its direction, which always begins alike. */
function findLargest(matrix) {
  let direction = normalize(matrix.map((_, place) => 1 + 0.618 * ((place * 7) % 11)));
  let value = 0;
  for (let round = 0; round < ROUNDS; round += 1) {
    const product = matrix.map((row) => row.reduce((sum, part, place) => sum + part * direction[place], 0));
    value = Math.hypot(...product);
    if (value === 0) {
      return { value, direction };
    }
    const next = product.map((part) => part / value);
    const change = Math.hypot(...next.map((part, place) => part - direction[place]));
    direction = next;
    if (change < ENOUGH) {
      break;
    }
  }
  return { value, direction };
}

function normalize(vector) {
  const length = Math.hypot(...vector);
  return vector.map((part) => part / length);
}
