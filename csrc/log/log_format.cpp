#include "log/log_format.hpp"

#include <algorithm>
#include <charconv>
#include <set>
#include <stdexcept>

#include "base/integers.hpp"

namespace hotbed {

namespace {

constexpr char kMagic[] = "hotbed row log\n";  // 16 bytes with the final zero
constexpr uint32_t kVersion = 1, kLinkedVersion = 2;
constexpr uint64_t kMostBlockUnits = 512;

// Appends numbers and texts to bytes.
struct Writer {
  std::vector<uint8_t> bytes;
  template <class T>
  void number(T value) {
    const auto* data = reinterpret_cast<const uint8_t*>(&value);
    bytes.insert(bytes.end(), data, data + sizeof value);
  }
  void text(const std::string& value) {
    number(static_cast<uint32_t>(value.size()));
    bytes.insert(bytes.end(), value.begin(), value.end());
  }
};

struct Reader {
  std::span<const uint8_t> bytes;
  const std::string& path;

  std::span<const uint8_t> take(size_t count) {
    if (count > bytes.size()) throw TierError(path + " ends too early to be a manifest.", path);
    auto part = bytes.first(count);
    bytes = bytes.subspan(count);
    return part;
  }
  template <class T>
  T number() {
    return read_as<T>(take(sizeof(T)).data());
  }
  std::string text() {
    auto part = take(number<uint32_t>());
    return {part.begin(), part.end()};
  }
};

std::string of_store(size_t store) { return "Store " + std::to_string(store) + " of a row log: "; }

}  // namespace

BlockLayout::BlockLayout(int64_t bytes_of_record) {
  if (bytes_of_record < 1 || bytes_of_record > kMostRecordBytes) {
    throw std::invalid_argument("a record has " + std::to_string(bytes_of_record) +
                                " bytes; it must have 1 to " + std::to_string(kMostRecordBytes) +
                                ".");
  }
  record_bytes = static_cast<uint32_t>(bytes_of_record);
  stride = record_bytes + sizeof(RecordHeader);
  for (uint64_t units = 1; units <= kMostBlockUnits; ++units) {
    block_bytes = static_cast<uint32_t>(units * kBlockUnit);
    records = (block_bytes - sizeof(BlockHeader)) / stride;
    if (4 * uint64_t{records} * stride >= 3 * uint64_t{block_bytes}) break;
  }
  erasures = std::min<uint32_t>((block_bytes - sizeof(BlockHeader)) / sizeof(Erasure), UINT16_MAX);
}

void seal_block(uint8_t* block, const BlockLayout& layout, BlockHeader header) {
  std::memcpy(block, &header, sizeof header);
  header.checksum = crc32c(block + sizeof(uint32_t), layout.block_bytes - sizeof(uint32_t));
  std::memcpy(block, &header.checksum, sizeof header.checksum);
}

BlockState check_block(const uint8_t* block, const BlockLayout& layout,
                       const BlockHeader& expected) {
  BlockHeader header = header_of(block);
  uint32_t checksum = crc32c(block + sizeof(uint32_t), layout.block_bytes - sizeof(uint32_t));
  if (header.checksum != checksum) {
    bool zeros = std::all_of(block, block + layout.block_bytes, [](uint8_t b) { return b == 0; });
    return zeros ? BlockState::empty : BlockState::torn;
  }
  bool same = header.log == expected.log && header.segment == expected.segment &&
              header.block == expected.block && header.store == expected.store;
  uint32_t most = header.kind == BlockKind::records    ? layout.records
                  : header.kind == BlockKind::erasures ? layout.erasures
                                                       : 0;
  return same && header.count <= most ? BlockState::good : BlockState::foreign;
}

void check_manifest(const Manifest& manifest) {
  if (manifest.stores.empty() || manifest.stores.size() > kMostStores) {
    throw std::invalid_argument("A row log has " + std::to_string(manifest.stores.size()) +
                                " stores; it must have 1 to " + std::to_string(kMostStores) + ".");
  }
  for (size_t s = 0; s < manifest.stores.size(); ++s) {
    const LogStore& store = manifest.stores[s];
    BlockLayout layout;
    try {
      layout = BlockLayout(store.record_bytes);
    } catch (const std::invalid_argument& error) {
      throw std::invalid_argument(of_store(s) + error.what());
    }
    uint64_t blocks = manifest.segment_bytes / layout.block_bytes;
    if (blocks < kLeastBlocks || blocks > kMostBlocks) {
      throw std::invalid_argument(
          of_store(s) + "a segment of " + std::to_string(manifest.segment_bytes) + " bytes holds " +
          std::to_string(blocks) + " blocks of " + std::to_string(layout.block_bytes) +
          " bytes; it must hold " + std::to_string(kLeastBlocks) + " to " +
          std::to_string(kMostBlocks) + ".");
    }
    std::set<int32_t> numbers;  // a key is looked up in its store
    for (const LogTable& table : store.tables) {
      std::string name = "Table '" + table.name + "' of a row log: ";
      if (table.table < 0 || static_cast<uint64_t>(table.table) >= kMostTables) {
        throw std::invalid_argument(name + "its number is " + std::to_string(table.table) +
                                    "; it must be 0 to " + std::to_string(kMostTables - 1) + ".");
      }
      if (table.rows < -1) {
        throw std::invalid_argument(name + "it has " + std::to_string(table.rows) +
                                    " rows; give -1 for a table of any ids.");
      }
      if (!numbers.insert(table.table).second) {
        throw std::invalid_argument(name + "another table has its number, " +
                                    std::to_string(table.table) + ".");
      }
    }
  }
}

std::vector<uint8_t> encode(const Manifest& manifest) {
  Writer out;
  out.bytes.assign(kMagic, kMagic + sizeof kMagic);
  out.number(manifest.linked ? kLinkedVersion : kVersion);
  out.number(manifest.log);
  out.number(manifest.segment_bytes);
  out.number(static_cast<uint32_t>(manifest.stores.size()));
  for (const LogStore& store : manifest.stores) {
    out.number(store.record_bytes);
    out.number(static_cast<uint32_t>(store.tables.size()));
    for (const LogTable& table : store.tables) {
      out.number(table.table);
      out.number(table.rows);
      out.text(table.name);
    }
  }
  for (size_t s = 0; manifest.linked && s < manifest.stores.size(); ++s) {
    const BlocksOfSegments& segments = manifest.linked->at(s);
    out.number(static_cast<uint32_t>(segments.size()));
    for (const auto& [number, blocks] : segments) {
      out.number(number);
      out.number(blocks);
    }
  }
  out.number(crc32c(out.bytes.data(), out.bytes.size()));
  return out.bytes;
}

bool begins_manifest(std::span<const uint8_t> bytes) {
  return bytes.size() >= sizeof kMagic && std::equal(kMagic, kMagic + sizeof kMagic, bytes.begin());
}

Manifest decode(std::span<const uint8_t> bytes, const std::string& path) {
  Reader in{bytes, path};
  in.take(sizeof kMagic);
  if (!begins_manifest(bytes)) {
    throw TierError(path + " is not the manifest of a row log.", path);
  }
  auto version = in.number<uint32_t>();
  if (version != kVersion && version != kLinkedVersion) {
    throw TierError(path + " is of format version " + std::to_string(version) +
                        "; this build reads versions " + std::to_string(kVersion) + " and " +
                        std::to_string(kLinkedVersion) + ".",
                    path);
  }
  if (bytes.size() < sizeof(uint32_t) ||
      crc32c(bytes.data(), bytes.size() - sizeof(uint32_t)) !=
          read_as<uint32_t>(bytes.data() + bytes.size() - sizeof(uint32_t))) {
    throw TierError(path + " is damaged: its checksum is wrong.", path);
  }
  Manifest manifest;
  manifest.log = in.number<uint32_t>();
  manifest.segment_bytes = in.number<uint64_t>();
  auto stores = in.number<uint32_t>();
  for (uint32_t s = 0; s < stores; ++s) {
    LogStore store{in.number<int64_t>(), {}};
    auto tables = in.number<uint32_t>();
    for (uint32_t t = 0; t < tables; ++t) {
      LogTable table;
      table.table = in.number<int32_t>();
      table.rows = in.number<int64_t>();
      table.name = in.text();
      store.tables.push_back(std::move(table));
    }
    manifest.stores.push_back(std::move(store));
  }
  if (version == kLinkedVersion) manifest.linked.emplace(stores);
  for (uint32_t s = 0; manifest.linked && s < stores; ++s) {
    for (auto left = in.number<uint32_t>(); left > 0; --left) {
      auto number = in.number<uint64_t>();
      (*manifest.linked)[s][number] = in.number<uint32_t>();
    }
  }
  check_manifest(manifest);
  return manifest;
}

std::string segment_name(size_t store, uint64_t number) {
  std::string digits = std::to_string(number);
  return std::to_string(store) + "-" +
         std::string(digits.size() < 10 ? 10 - digits.size() : 0, '0') + digits + ".rows";
}

bool parse_segment_name(const std::string& name, size_t* store, uint64_t* number) {
  const char* end = name.data() + name.size();
  auto [dash, first_error] = std::from_chars(name.data(), end, *store);
  if (first_error != std::errc() || dash == end || *dash != '-') return false;
  auto [dot, second_error] = std::from_chars(dash + 1, end, *number);
  return second_error == std::errc() && name == segment_name(*store, *number);
}

}  // namespace hotbed
