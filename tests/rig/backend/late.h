// Devices that take time. While the model watches, a copy between pinned memory and a device that is not to block runs
// as late as it may: when its stream or an event behind it is waited for, or before the next operation of its stream.
// Until then its target is filled with 0xFF. Everything else runs at once.
//
// Who may rely on what is followed with vector clocks: one for the host (all its threads are taken for one) and one for
// each stream. Two accesses to the same bytes, one of them a write, of which neither waited for the other, are a hazard.
#pragma once

#include "place.h"

#include <ATen/ATen.h>
#include <c10/core/impl/alloc_cpu.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>

namespace rig {

struct Access {
  size_t begin, end;  // bytes of the memory
  size_t who;         // a stream, see Late::index_of()
  uint64_t when;      // by that stream's own clock
  bool write, is_copy;
  int place;
  std::string name;
};

// Memory of a device, or pinned memory of the host. Copies that have not run keep it; it counts as allocated no more.
struct Memory {
  void* data;
  size_t bytes;
  c10::Storage host;     // owns `data` where it is the result of a CPU kernel
  int device;            // -1 is the host
  c10::StreamId stream;  // on which it was allocated
  uint64_t watch = 0;    // to which the rest belongs
  std::vector<Access> accesses{};
  std::vector<size_t> recorded{};  // the streams of record_stream()

  Memory(void* data, size_t bytes, c10::Storage host, int device, c10::StreamId stream)
      : data(data), bytes(bytes), host(std::move(host)), device(device), stream(stream) {}
  Memory(const Memory&) = delete;
  ~Memory() {
    if (!host) c10::free_cpu(data);
  }
};
using SharedMemory = std::shared_ptr<Memory>;

struct Range {
  size_t begin, end;
};

inline Range range_of(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return {0, 0};
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  const auto item = static_cast<int64_t>(tensor.element_size());
  const auto begin = tensor.storage_offset() * item;
  return {static_cast<size_t>(begin), static_cast<size_t>(begin + (last + 1) * item)};
}

class Late {
 public:
  using Clock = std::vector<uint64_t>;
  struct Mark {  // a point of a stream: what an event is
    size_t who = 0;
    uint64_t tasks = 0;
    Clock clock;
    uint64_t watch = 0;
  };
  struct Operation {
    size_t who;
    uint64_t when;
    int place;
    std::string name;
  };

  static Late& get() {
    static auto* late = new Late;
    return *late;
  }
  static bool watches() { return watching_; }

  void start() {
    std::lock_guard lock(mutex_);
    ++watch_;
    indices_.clear();
    streams_.clear();
    streams_.emplace_back();  // the host
    hazards_.clear();
    watching_ = true;
  }

  void stop() {
    std::lock_guard lock(mutex_);
    for (size_t i = 1; i < streams_.size(); ++i) run(i, streams_[i].issued);
    hazards_ = with_early_frees();
    indices_.clear();
    streams_.clear();
    watching_ = false;
  }

  // ---- operations of a stream

  // One that runs now: after what its stream waits for.
  Operation begin(int device, c10::StreamId stream, std::string name) {
    return begin(device, stream, std::move(name), true);
  }

  void touch(const Operation& operation, const SharedMemory& memory, Range range, bool write) {
    if (!memory || range.begin == range.end) return;
    std::lock_guard lock(mutex_);
    access(*memory, {range.begin, range.end, operation.who, operation.when, write, false, operation.place, operation.name});
  }

  // A copy that runs later.
  void copy_later(
      int device, c10::StreamId stream, const SharedMemory& from, Range source, const SharedMemory& to, Range target) {
    const auto operation = begin(device, stream, "copy", false);
    std::lock_guard lock(mutex_);
    if (source.begin == source.end) return;
    access(*from, {source.begin, source.end, operation.who, operation.when, false, true, operation.place, operation.name});
    access(*to, {target.begin, target.end, operation.who, operation.when, true, true, operation.place, operation.name});
    memset(static_cast<char*>(to->data) + target.begin, 0xFF, target.end - target.begin);
    auto& on = streams_[operation.who];
    ++on.issued;
    on.tasks.push_back({from, to, source.begin, target.begin, source.end - source.begin, {}});
  }

  // ---- waiting

  void host_waits_for_stream(int device, c10::StreamId stream) {
    std::lock_guard lock(mutex_);
    host_waits(index_of(device, stream));
  }
  void host_waits_for_device(int device) {
    std::lock_guard lock(mutex_);
    for (const auto& [key, who] : indices_) {
      if (key.first == device) host_waits(who);
    }
  }
  void host_waits_for(const Mark& mark) {
    std::lock_guard lock(mutex_);
    if (mark.watch != watch_) return;
    run(mark.who, mark.tasks);
    join(streams_[0].clock, mark.clock);
  }
  Mark mark(int device, c10::StreamId stream) {
    std::lock_guard lock(mutex_);
    const auto who = index_of(device, stream);
    auto& of = streams_[who];
    join(of.clock, streams_[0].clock);
    return {who, of.issued, of.clock, watch_};
  }
  void stream_waits_for(int device, c10::StreamId stream, const Mark& mark) {
    std::lock_guard lock(mutex_);
    if (mark.watch != watch_) return;
    auto& on = streams_[index_of(device, stream)];
    join(on.clock, mark.clock);
    ++on.issued;
    on.tasks.push_back({nullptr, nullptr, 0, 0, 0, mark});
  }

  // ---- memory

  void host_touches(Memory& memory, Range range, bool write, const std::string& name) {
    const int place = Places::get().here();
    std::lock_guard lock(mutex_);
    if (memory.watch != watch_) return;
    for (const auto& earlier : memory.accesses) {
      if (earlier.begin >= range.end || range.begin >= earlier.end || !(write || earlier.write) || knows(0, earlier)) continue;
      const char* kind = !write ? "early host read" : earlier.write ? "early host write" : "changed source";
      report(kind, memory.bytes, earlier, 0, name, place);
    }
  }
  void record_stream(Memory& memory, int device, c10::StreamId stream) {
    std::lock_guard lock(mutex_);
    renew(memory);
    memory.recorded.push_back(index_of(device, stream));
  }
  // Memory that was just allocated may be what was freed before on its stream, while another one uses it yet.
  void allocated(int device, c10::StreamId stream, size_t bytes) {
    {
      std::lock_guard lock(mutex_);
      if (streams_[index_of(device, stream)].freed.empty()) return;
    }
    const int place = Places::get().here();
    std::lock_guard lock(mutex_);
    const auto who = index_of(device, stream);
    auto& freed = streams_[who].freed;
    for (auto block = freed.begin(); block != freed.end();) {
      bool used = false;
      for (const auto& access : block->accesses) {
        if (knows(who, access)) continue;
        used = true;
        if (is_large(bytes) != is_large(block->bytes)) continue;
        add(hazards_, "reuse", block->bytes, access, who, "allocation", place, block->place);
      }
      block = !used || is_large(bytes) == is_large(block->bytes) ? freed.erase(block) : block + 1;
    }
  }
  void freed(Memory& memory) {
    Freed block{memory.bytes, 0, {}};
    {
      std::lock_guard lock(mutex_);
      if (memory.watch != watch_) return;
      const auto who = index_of(memory.device, memory.stream);
      for (const auto& access : memory.accesses) {
        const auto& recorded = memory.recorded;
        if (access.who == who || knows(who, access)) continue;
        if (std::find(recorded.begin(), recorded.end(), access.who) != recorded.end()) continue;
        block.accesses.push_back(access);
      }
    }
    if (block.accesses.empty()) return;
    block.place = Places::get().here();
    std::lock_guard lock(mutex_);
    streams_[index_of(memory.device, memory.stream)].freed.push_back(std::move(block));
  }
  // Waits for whoever uses what is given back.
  void cache_emptied(int device) {
    std::lock_guard lock(mutex_);
    for (const auto& [key, who] : indices_) {
      if (key.first == device) streams_[who].freed.clear();
    }
  }

  // ---- hazards: kind, bytes, count, of both ends stream, operation and place, where memory was freed

  std::vector<std::string> hazards() {
    std::vector<std::string> lines;
    for (const auto& [hazard, found] : all_hazards()) {
      const auto& [kind, first, second] = hazard;
      std::string line = kind + '\x1f' + std::to_string(found.bytes) + '\x1f' + std::to_string(found.count);
      line += '\x1f' + first.first + '\x1f' + found.first + '\x1f' + Places::get().text(first.second);
      line += '\x1f' + second.first + '\x1f' + found.second + '\x1f' + Places::get().text(second.second);
      line += '\x1f' + Places::get().text(found.freed);
      lines.push_back(std::move(line));
    }
    return lines;
  }

 private:
  struct Task {  // a copy, or a mark to wait for
    SharedMemory from, to;
    size_t source, target, bytes;
    Mark mark;
  };
  struct Freed {
    size_t bytes;
    int place;
    std::vector<Access> accesses;
  };
  struct Stream {
    std::string name = "host";
    Clock clock;
    std::deque<Task> tasks;
    uint64_t issued = 0, done = 0;
    std::vector<Freed> freed;
  };
  using End = std::pair<std::string, int>;  // the stream and the place
  struct Found {
    size_t bytes = 0, count = 0;
    std::string first, second;  // what the operations of both ends are called, the first time
    int freed = 0;              // where memory was freed that is used again
  };
  using Hazards = std::map<std::tuple<std::string, End, End>, Found>;

  // What was found and what is freed now while another stream uses it, if nothing more happens.
  Hazards with_early_frees() {
    auto found = hazards_;
    for (size_t i = 1; i < streams_.size(); ++i) {
      for (const auto& freed : streams_[i].freed) {
        for (const auto& access : freed.accesses) {
          if (!knows(i, access)) add(found, "early free", freed.bytes, access, i, "free", freed.place);
        }
      }
    }
    return found;
  }
  Hazards all_hazards() {
    std::lock_guard lock(mutex_);
    return with_early_frees();
  }

  // Two pools, as in torch's allocator.
  static bool is_large(size_t bytes) { return bytes > (size_t(1) << 20); }

  static void join(Clock& to, const Clock& from) {
    if (to.size() < from.size()) to.resize(from.size());
    for (size_t i = 0; i < from.size(); ++i) to[i] = std::max(to[i], from[i]);
  }
  // Whether it happened before what `who` does next. What the host knows is so for whatever it starts.
  bool knows(size_t who, const Access& access) const {
    for (const auto of : {who, size_t(0)}) {
      const auto& clock = streams_[of].clock;
      if (access.who < clock.size() && access.when <= clock[access.who]) return true;
    }
    return false;
  }
  size_t index_of(int device, c10::StreamId stream) {
    auto [known, is_new] = indices_.try_emplace({device, stream}, streams_.size());
    if (is_new) {
      streams_.emplace_back();
      streams_.back().name =
          "device " + std::to_string(device) + (stream ? ", stream " + std::to_string(stream) : ", default stream");
    }
    return known->second;
  }
  Operation begin(int device, c10::StreamId stream, std::string name, bool now) {
    const int place = Places::get().here();
    std::lock_guard lock(mutex_);
    const auto who = index_of(device, stream);
    auto& on = streams_[who];
    if (now) run(who, on.issued);
    join(on.clock, streams_[0].clock);
    if (on.clock.size() <= who) on.clock.resize(who + 1);
    return {who, ++on.clock[who], place, std::move(name)};
  }
  void host_waits(size_t who) {
    run(who, streams_[who].issued);
    join(streams_[0].clock, streams_[who].clock);
  }
  void run(size_t who, uint64_t until) {
    while (streams_[who].done < until && !streams_[who].tasks.empty()) {
      const auto task = std::move(streams_[who].tasks.front());
      streams_[who].tasks.pop_front();
      ++streams_[who].done;
      if (task.from) {
        memcpy(static_cast<char*>(task.to->data) + task.target, static_cast<char*>(task.from->data) + task.source, task.bytes);
      } else {
        run(task.mark.who, task.mark.tasks);
      }
    }
  }
  void renew(Memory& memory) const {
    if (memory.watch == watch_) return;
    memory.watch = watch_;
    memory.accesses.clear();
    memory.recorded.clear();
  }
  void access(Memory& memory, Access now) {
    renew(memory);
    auto& all = memory.accesses;
    for (auto earlier = all.begin(); earlier != all.end();) {
      const bool overlap = earlier->begin < now.end && now.begin < earlier->end;
      const bool ordered = knows(now.who, *earlier);
      if (overlap && !ordered && (now.write || earlier->write)) {
        report("race", memory.bytes, *earlier, now.who, now.name, now.place);
      }
      const bool covered = now.begin <= earlier->begin && earlier->end <= now.end;
      earlier = covered && ordered && (now.write || !earlier->write) ? all.erase(earlier) : earlier + 1;
    }
    all.push_back(std::move(now));
  }
  void report(const char* kind, size_t bytes, const Access& first, size_t who, const std::string& name, int place) {
    add(hazards_, kind, bytes, first, who, name, place);
  }
  void add(
      Hazards& hazards, const char* kind, size_t bytes, const Access& first, size_t who, const std::string& name,
      int place, int freed = 0) const {
    const char* does = first.is_copy ? "" : first.write ? " writes" : " reads";
    auto& found = hazards[{kind, {streams_[first.who].name, first.place}, {streams_[who].name, place}}];
    if (found.count == 0) found = {0, 0, first.name + does, name, freed};
    found.bytes += bytes;
    ++found.count;
  }

  std::mutex mutex_;
  inline static std::atomic<bool> watching_{false};
  uint64_t watch_ = 0;
  std::map<std::pair<int, c10::StreamId>, size_t> indices_;
  std::deque<Stream> streams_;
  Hazards hazards_;
};

}  // namespace rig
