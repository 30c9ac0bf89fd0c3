// Where in a Python program the calling thread is: the innermost frames outside of torch and of the rig.
#pragma once

#include <c10/util/python_stub.h>

#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

// Of Python's stable interface; its header may not be installed.
extern "C" {
int PyGILState_Ensure();
void PyGILState_Release(int);
PyObject* PyEval_GetFrame();
PyObject* PyFrame_GetBack(PyObject*);
PyObject* PyFrame_GetCode(PyObject*);
int PyFrame_GetLineNumber(PyObject*);
PyObject* PyObject_GetAttrString(PyObject*, const char*);
const char* PyUnicode_AsUTF8(PyObject*);
void PyErr_Fetch(PyObject**, PyObject**, PyObject**);
void PyErr_Restore(PyObject*, PyObject*, PyObject*);
void Py_IncRef(PyObject*);
void Py_DecRef(PyObject*);
void* PyInterpreterState_Get();
void* PyInterpreterState_ThreadHead(void*);
void* PyThreadState_Next(void*);
PyObject* PyThreadState_GetFrame(void*);
}

namespace rig {

class Places {
 public:
  using Place = std::vector<std::pair<PyObject*, int>>;  // code and line, the innermost first

  static Places& get() {
    static auto* places = new Places;
    return *places;
  }

  // Files whose path begins so, or whose frames have no file, are left out.
  void leave_out(std::vector<std::string> beginnings) {
    std::lock_guard lock(mutex_);
    beginnings_ = std::move(beginnings);
    left_out_.clear();
  }

  // The number of the place where this thread is. A thread without Python code, such as one of autograd's, is where
  // the thread is that waits for it. Takes Python's lock, so not to be called with another one that this waits for.
  int here() {
    const int state = PyGILState_Ensure();
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    auto* frame = PyEval_GetFrame();
    if (frame != nullptr) {
      Py_IncRef(frame);
    } else {
      frame = waiting_for_autograd();
    }
    const int found = number_of(walk(frame));
    PyErr_Restore(type, value, trace);
    PyGILState_Release(state);
    return found;
  }

  // "file:line in function", the innermost first, one a line.
  std::string text(int number) {
    const int state = PyGILState_Ensure();
    std::string lines;
    {
      std::lock_guard lock(mutex_);
      for (const auto& [code, line] : places_.at(number)) {
        if (!lines.empty()) lines += '\n';
        lines += attribute(code, "co_filename") + ":" + std::to_string(line) + " in " + attribute(code, "co_name");
      }
    }
    PyGILState_Release(state);
    return lines;
  }

 private:
  static constexpr size_t kFrames = 5;

  static std::string attribute(PyObject* of, const char* name) {
    auto* value = PyObject_GetAttrString(of, name);
    const char* text = value != nullptr ? PyUnicode_AsUTF8(value) : nullptr;
    std::string result = text != nullptr ? text : "";
    if (value != nullptr) Py_DecRef(value);
    return result;
  }

  // A frame of a thread that is in torch.autograd, since those are waiting for autograd's own threads.
  static PyObject* waiting_for_autograd() {
    for (void* thread = PyInterpreterState_ThreadHead(PyInterpreterState_Get()); thread != nullptr;
         thread = PyThreadState_Next(thread)) {
      auto* frame = PyThreadState_GetFrame(thread);
      if (frame == nullptr) continue;
      auto* code = PyFrame_GetCode(frame);
      const bool waits = attribute(code, "co_filename").find("/torch/autograd/") != std::string::npos;
      Py_DecRef(code);
      if (waits) return frame;
      Py_DecRef(frame);
    }
    return nullptr;
  }

  Place walk(PyObject* frame) {
    Place place;
    while (frame != nullptr && place.size() < kFrames) {
      auto* code = PyFrame_GetCode(frame);
      if (!is_left_out(code)) place.emplace_back(code, PyFrame_GetLineNumber(frame));
      Py_DecRef(code);  // is_left_out() has one of its own
      auto* back = PyFrame_GetBack(frame);
      Py_DecRef(frame);
      frame = back;
    }
    if (frame != nullptr) Py_DecRef(frame);
    return place;
  }

  // Keeps the code alive, so that its address is that of no other.
  bool is_left_out(PyObject* code) {
    std::lock_guard lock(mutex_);
    auto [known, is_new] = left_out_.try_emplace(code, false);
    if (is_new) {
      if (kept_.emplace(code, true).second) Py_IncRef(code);
      const auto file = attribute(code, "co_filename");
      known->second = file.empty() || file[0] == '<';
      for (const auto& beginning : beginnings_) known->second |= file.compare(0, beginning.size(), beginning) == 0;
    }
    return known->second;
  }

  int number_of(Place place) {
    std::lock_guard lock(mutex_);
    auto [known, is_new] = numbers_.try_emplace(std::move(place), static_cast<int>(places_.size()));
    if (is_new) places_.push_back(known->first);
    return known->second;
  }

  std::mutex mutex_;
  std::vector<std::string> beginnings_;
  std::unordered_map<PyObject*, bool> left_out_, kept_;
  std::map<Place, int> numbers_{{Place{}, 0}};
  std::vector<Place> places_{Place{}};
};

}  // namespace rig
