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
 * What a result is compared by: the number of rows and the sum and the exclusive or of their 64-bit hashes, which do
 * not depend on the order of rows, and on request whether the rows are in order of their first column.
 *
 * <p>A lost, a repeated and a changed row all change it (the exclusive or alone would not see a pair of repeats).
 */
final class Digest {
  /** One row whose bytes and key are looked at and not kept. */
  interface Rows<T> extends Serializable {
    long hash(T row);

    /** The key by which the result is sorted, compared as unsigned bytes; null when no order is promised. */
    byte[] key(T row);
  }

  /** What one task found out about its partition. */
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

  /** Digest of a query's result, computed by the tasks that produce it: nothing is added to its plan. */
  static Digest of(Dataset<Row> result) {
    return of(result.queryExecution().toRdd().toJavaRDD(), new UnsafeRows(false));
  }

  /** The same, of a result that must be sorted by its first, binary, column. */
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
