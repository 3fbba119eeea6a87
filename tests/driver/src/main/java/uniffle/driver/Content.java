package uniffle.driver;

import java.nio.ByteBuffer;
import java.util.Random;

/**
 * Content of a block: its id, then a window of random bytes chosen by the id. A block identifies itself, and all of
 * its bytes can be verified.
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

  /** Verifies every byte of a block and returns its id. */
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
