package uniffle;

import java.io.Serializable;
import java.util.Arrays;
import java.util.Comparator;
import java.util.Iterator;
import java.util.List;
import org.apache.spark.api.java.JavaRDD;
import org.apache.spark.sql.Dataset;
import org.apache.spark.sql.Row;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.catalyst.expressions.UnsafeRow;
import org.apache.spark.sql.catalyst.expressions.XXH64;
import org.apache.spark.unsafe.Platform;

/**
 * Digest of a result: the number of rows, and the sum and exclusive or of their 64-bit hashes, which are independent of
 * the order of rows. If rows have keys, it also tells whether they are sorted by key.
 *
 * <p>A lost, repeated or changed row changes it. The exclusive or alone would miss a pair of duplicates.
 */
final class Digest {
  /** Access to the hash and the key of a row. */
  interface Rows<T> extends Serializable {
    long hash(T row);

    /** Returns the sort key, compared as unsigned bytes, or null if no order is required. */
    byte[] key(T row);
  }

  /** Digest of one partition, computed by its task. */
  private static final class Part implements Serializable {
    private static final long serialVersionUID = 1L;
    private final int partition;
    private long rows;
    private long sum;
    private long xor;
    private boolean ordered = true;
    private byte[] first;
    private byte[] last;

    Part(int partition) {
      this.partition = partition;
    }

    void add(long hash, byte[] key) {
      rows++;
      sum += hash;
      xor ^= hash;
      if (key == null) {
        return;
      }
      if (first == null) {
        first = key;
      } else if (Arrays.compareUnsigned(last, key) > 0) {
        ordered = false;
      }
      last = key;
    }
  }

  final long rows;
  final boolean ordered;
  private final long sum;
  private final long xor;

  private Digest(List<Part> parts) {
    long rows = 0;
    long sum = 0;
    long xor = 0;
    boolean ordered = true;
    byte[] last = null;
    for (Part part : parts) {
      rows += part.rows;
      sum += part.sum;
      xor ^= part.xor;
      ordered &= part.ordered;
      if (part.first != null) {
        ordered &= last == null || Arrays.compareUnsigned(last, part.first) <= 0;
        last = part.last;
      }
    }
    this.rows = rows;
    this.ordered = ordered;
    this.sum = sum;
    this.xor = xor;
  }

  /** Returns the digest of a query's result. The query's own tasks compute it, so its plan is unchanged. */
  static Digest of(Dataset<Row> result) {
    return of(result.queryExecution().toRdd().toJavaRDD(), new UnsafeRows(false));
  }

  /** Like {@link #of(Dataset)}, for a result that must be sorted by its first, binary, column. */
  static Digest ofSorted(Dataset<Row> result) {
    return of(result.queryExecution().toRdd().toJavaRDD(), new UnsafeRows(true));
  }

  static <T> Digest of(JavaRDD<T> result, Rows<T> look) {
    List<Part> parts = result.mapPartitionsWithIndex((index, rows) -> part(index, rows, look), true).collect();
    parts = new java.util.ArrayList<>(parts);
    parts.sort(Comparator.comparingInt(part -> part.partition));
    return new Digest(parts);
  }

  private static <T> Iterator<Part> part(int index, Iterator<T> rows, Rows<T> look) {
    Part part = new Part(index);
    while (rows.hasNext()) {
      T row = rows.next();
      part.add(look.hash(row), look.key(row));
    }
    return List.of(part).iterator();
  }

  static long hash(byte[] bytes) {
    return XXH64.hashUnsafeBytes(bytes, Platform.BYTE_ARRAY_OFFSET, bytes.length, 42L);
  }

  private static final class UnsafeRows implements Rows<InternalRow> {
    private static final long serialVersionUID = 1L;
    private final boolean sorted;

    UnsafeRows(boolean sorted) {
      this.sorted = sorted;
    }

    @Override
    public long hash(InternalRow row) {
      UnsafeRow bytes = (UnsafeRow) row;
      return XXH64.hashUnsafeBytes(bytes.getBaseObject(), bytes.getBaseOffset(), bytes.getSizeInBytes(), 42L);
    }

    @Override
    public byte[] key(InternalRow row) {
      return sorted ? row.getBinary(0) : null;
    }
  }

  @Override
  public String toString() {
    return String.format("%d:%016x:%016x", rows, sum, xor);
  }
}
