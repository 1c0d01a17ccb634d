/* SPDX-License-Identifier: GPL-2.0-only */
#undef TRACE_SYSTEM
#define TRACE_SYSTEM dma_bounce

#if !defined(_TRACE_DMA_BOUNCE_H) || defined(TRACE_HEADER_MULTI_READ)
#define _TRACE_DMA_BOUNCE_H

#include <linux/device.h>
#include <linux/tracepoint.h>

#define dma_bounce_show_kind(kind)	\
	__print_symbolic(kind, { 0, "read" }, { 1, "write" }, { 2, "rw" })

DECLARE_EVENT_CLASS(dma_bounce_slot,
	TP_PROTO(struct device *dev, dma_addr_t addr, unsigned int len, unsigned int nents,
		 bool copy),
	TP_ARGS(dev, addr, len, nents, copy),
	TP_STRUCT__entry(
		__string(device, dev_name(dev))
		__field(u64, addr)
		__field(unsigned int, len)
		__field(unsigned int, nents)
		__field(bool, copy)
	),
	TP_fast_assign(
		__assign_str(device);
		__entry->addr = addr;
		__entry->len = len;
		__entry->nents = nents;
		__entry->copy = copy;
	),
	TP_printk("%s addr=%#llx len=%u nents=%u copy=%d", __get_str(device), __entry->addr,
		  __entry->len, __entry->nents, __entry->copy)
);

/* A slot serves a mapping. nents is 0 for a single mapping. */
DEFINE_EVENT(dma_bounce_slot, dma_bounce_map,
	TP_PROTO(struct device *dev, dma_addr_t addr, unsigned int len, unsigned int nents,
		 bool copy),
	TP_ARGS(dev, addr, len, nents, copy));

DEFINE_EVENT(dma_bounce_slot, dma_bounce_unmap,
	TP_PROTO(struct device *dev, dma_addr_t addr, unsigned int len, unsigned int nents,
		 bool copy),
	TP_ARGS(dev, addr, len, nents, copy));

/* A sync call for part of a slot's mapping. copy is 1 if bytes were copied. */
TRACE_EVENT(dma_bounce_sync,
	TP_PROTO(struct device *dev, dma_addr_t addr, unsigned int len, bool for_device,
		 bool copy),
	TP_ARGS(dev, addr, len, for_device, copy),
	TP_STRUCT__entry(
		__string(device, dev_name(dev))
		__field(u64, addr)
		__field(unsigned int, len)
		__field(bool, for_device)
		__field(bool, copy)
	),
	TP_fast_assign(
		__assign_str(device);
		__entry->addr = addr;
		__entry->len = len;
		__entry->for_device = for_device;
		__entry->copy = copy;
	),
	TP_printk("%s addr=%#llx len=%u for=%s copy=%d", __get_str(device), __entry->addr,
		  __entry->len, __entry->for_device ? "device" : "cpu", __entry->copy)
);

/* A mapping did not bounce. The reason is the name of a counter in debugfs. */
TRACE_EVENT(dma_bounce_fallback,
	TP_PROTO(struct device *dev, const char *reason),
	TP_ARGS(dev, reason),
	TP_STRUCT__entry(
		__string(device, dev_name(dev))
		__string(reason, reason)
	),
	TP_fast_assign(
		__assign_str(device);
		__assign_str(reason);
	),
	TP_printk("%s %s", __get_str(device), __get_str(reason))
);

/* A chunk was added to a pool, or given back. The name of the pool is the name of its first device.
 */
TRACE_EVENT(dma_bounce_chunk,
	TP_PROTO(const char *pool, dma_addr_t iova, size_t size, unsigned int kind, bool add),
	TP_ARGS(pool, iova, size, kind, add),
	TP_STRUCT__entry(
		__string(pool, pool)
		__field(u64, iova)
		__field(size_t, size)
		__field(unsigned int, kind)
		__field(bool, add)
	),
	TP_fast_assign(
		__assign_str(pool);
		__entry->iova = iova;
		__entry->size = size;
		__entry->kind = kind;
		__entry->add = add;
	),
	TP_printk("%s %s iova=%#llx size=%zu kind=%s", __get_str(pool),
		  __entry->add ? "add" : "del", __entry->iova, __entry->size,
		  dma_bounce_show_kind(__entry->kind))
);

#endif /* _TRACE_DMA_BOUNCE_H */

#include <trace/define_trace.h>
