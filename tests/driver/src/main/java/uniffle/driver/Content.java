package uniffle.driver;

import java.nio.ByteBuffer;
import java.util.Random;

/**
 * What is in a block: its id, then a window of random bytes that the id chooses. A block read back names itself, and
 * every byte of it is known.
 */
final class Content {
  private static final int POOL_BYTES = 4 << 20;

  private final byte[] pool;

  Content(int blockBytes) {
    pool = new byte[POOL_BYTES + blockBytes];
    new Random(1).nextBytes(pool);
  }

  private static int window(long id) {
    return (int) ((id * 0x9e3779b97f4a7c15L) >>> 42);
  }

  byte[] block(long id, int length) {
    byte[] block = new byte[length];
    ByteBuffer.wrap(block).putLong(id);
    System.arraycopy(pool, window(id), block, Long.BYTES, length - Long.BYTES);
    return block;
  }

  /** The id of a block, all bytes of which were compared. */
  long check(ByteBuffer block, int length) {
    if (block.remaining() != length) {
      throw new IllegalStateException("a block of " + block.remaining() + " bytes, " + length + " were written");
    }
    long id = block.getLong();
    int wrong = block.mismatch(ByteBuffer.wrap(pool, window(id), length - Long.BYTES));
    if (wrong >= 0) {
      throw new IllegalStateException(
          "block " + id + " differs from what was written at byte " + (wrong + Long.BYTES));
    }
    return id;
  }
}
