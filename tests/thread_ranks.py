"""Ranks that are threads of one process, for tests of what ranks say to each other."""

import queue
import threading


class ThreadRanks:
    """Ranks that are threads of this process; on so many machines, which they only pretend to be."""

    def __init__(self, size, machines=1):
        self.machines = machines
        self.boxes = [queue.SimpleQueue() for _ in range(size)]
        self._orders = [queue.SimpleQueue() for _ in range(size)]
        self._meet, self._shared, self._brought = threading.Barrier(size), {}, [None] * size
        self.all = [Thread(self, rank) for rank in range(size)]


class Thread:
    def __init__(self, ranks, rank):
        self._ranks, self.rank, self.size, self.boxes = ranks, rank, len(ranks.boxes), ranks.boxes
        self.machines, self.local_size = ranks.machines, self.size // ranks.machines
        self.machine, self.local_rank = divmod(rank, self.local_size)
        self.gpu_rank, self.local_cores, self.wait_s = self.local_rank, self.size, None
        self.is_over, self.left_with = False, "nothing"
        self.hosts = tuple(f"host{i}" for i in range(self.size))

    def broadcast(self, value):
        if self.rank:
            return self._ranks._orders[self.rank].get()
        for box in self._ranks._orders[1:]:
            box.put(value)
        return value

    def send(self, to, message):
        self._ranks.boxes[to].put((self.rank, message))

    def receive(self):
        try:
            return self._ranks.boxes[self.rank].get_nowait()
        except queue.Empty:
            return None

    def exchange(self, arrays, cuts):
        group = self._ranks
        group._shared[self.rank] = [array[cuts[self.rank] : cuts[self.rank + 1]].copy() for array in arrays]
        group._meet.wait()
        for rank, told in group._shared.items():
            for array, rows in zip(arrays, told, strict=True):
                array[cuts[rank] : cuts[rank + 1]] = rows
        group._meet.wait()

    def share(self, nbytes):
        self._ranks._shared[self.machine, self.local_rank] = bytearray(nbytes)
        self.meet()
        memory = self._ranks._shared[self.machine, 0]
        self.meet()
        return memory

    def exchange_machines(self, array, cuts):
        self._ranks._shared[self.machine, self.local_rank] = array
        self.meet()
        for machine in range(self.machines):
            rows = slice(cuts[machine], cuts[machine + 1])
            array[rows] = self._ranks._shared[machine, 0][rows]
        self.meet()
        self._ranks._shared.clear()

    def meet(self, error=None):
        self._ranks._brought[self.rank] = error
        self._ranks._meet.wait(self.wait_s)
        found = next((error for error in self._ranks._brought if error is not None), None)
        self._ranks._meet.wait(self.wait_s)
        if found is not None:
            raise found

    def leave(self, code=None):
        self.is_over, self.left_with = code is None, code
