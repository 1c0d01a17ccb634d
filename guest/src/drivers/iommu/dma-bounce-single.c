// SPDX-License-Identifier: GPL-2.0-only
/*
 * Bounce buffers for one mapping each
 *
 * A device that is not trusted must not see what shares a page with the buffer that it is given, so
 * a mapping that does not fill its pages has to bounce. If the pool cannot serve it, it gets pages
 * of its own, which are mapped for it alone and zero but for the buffer's bytes. That is slow, and
 * rare: the pool grows.
 */

#include <linux/gfp.h>
#include <linux/iommu.h>
#include <linux/iova.h>
#include <linux/mm.h>
#include <linux/slab.h>

#include "dma-bounce-copy.h"
#include "dma-bounce-single.h"
#include "dma-bounce-types.h"

/**
 * struct single_use - a mapping that has a buffer of its own
 * @phys:	what is mapped
 * @len:	its bytes
 * @addr:	where the device sees it
 * @va:		where its copy is
 * @order:	of the pages of the copy
 * @read_only:	the device may not write it
 */
struct single_use {
	phys_addr_t	phys;
	size_t		len;
	dma_addr_t	addr;
	void		*va;
	unsigned int	order;
	bool		read_only;
};

static void *single_pages(struct single_use *single)
{
	return (void *)((unsigned long)single->va & PAGE_MASK);
}

static unsigned long single_npages(struct single_use *single)
{
	return DIV_ROUND_UP(offset_in_page(single->va) + single->len, PAGE_SIZE);
}

static unsigned long single_index(struct single_use *single)
{
	return single->addr >> PAGE_SHIFT;
}

static void single_free(struct single_use *single)
{
	free_pages((unsigned long)single_pages(single), single->order);
	kfree(single);
}

/* Has every page of the mapping lead to it, or none. */
static int single_insert(struct dma_bounce_pool *pool, struct single_use *single)
{
	unsigned long first = single_index(single), i, flags;
	int ret = 0;

	xa_lock_irqsave(&pool->single_use, flags);
	for (i = 0; i < single_npages(single) && !ret; i++)
		ret = xa_err(__xa_store(&pool->single_use, first + i, single, GFP_ATOMIC));
	if (ret) {
		while (i--)
			__xa_erase(&pool->single_use, first + i);
	}
	xa_unlock_irqrestore(&pool->single_use, flags);
	return ret;
}

static void single_erase(struct dma_bounce_pool *pool, struct single_use *single)
{
	unsigned long first = single_index(single), i, flags;

	xa_lock_irqsave(&pool->single_use, flags);
	for (i = 0; i < single_npages(single); i++)
		__xa_erase(&pool->single_use, first + i);
	xa_unlock_irqrestore(&pool->single_use, flags);
}

/* Pages of IOVA: granules may be larger than pages. */
static size_t single_iova_len(struct dma_bounce_pool *pool, struct single_use *single)
{
	return iova_align(pool->iovad, PAGE_SIZE << single->order);
}

static int single_map_iova(struct dma_bounce_pool *pool, u64 mask, struct single_use *single,
			   int prot)
{
	size_t len = single_iova_len(pool, single);
	unsigned long shift = iova_shift(pool->iovad), pfn;
	dma_addr_t iova;
	int ret;

	/* Pages larger than what is allocated would show the device what follows. */
	if (len != PAGE_SIZE << single->order)
		return -EINVAL;
	if (pool->domain->geometry.force_aperture)
		mask = min_t(u64, mask, pool->domain->geometry.aperture_end);
	pfn = alloc_iova_fast(pool->iovad, len >> shift, mask >> shift, true);
	if (!pfn)
		return -ENOSPC;
	iova = (dma_addr_t)pfn << shift;
	ret = iommu_map(pool->domain, iova, virt_to_phys(single_pages(single)), len, prot,
			GFP_ATOMIC);
	if (ret) {
		free_iova_fast(pool->iovad, pfn, len >> shift);
		return ret;
	}
	single->addr = iova + offset_in_page(single->va);
	return 0;
}

static void single_unmap_iova(struct dma_bounce_pool *pool, struct single_use *single)
{
	size_t len = single_iova_len(pool, single);
	unsigned long shift = iova_shift(pool->iovad);
	dma_addr_t iova = single->addr & ~(dma_addr_t)iova_mask(pool->iovad);

	/* Pages that a device may still reach are lost rather than given to somebody else. */
	if (WARN_ON_ONCE(iommu_unmap(pool->domain, iova, len) != len)) {
		kfree(single);
		return;
	}
	free_iova_fast(pool->iovad, iova >> shift, len >> shift);
	single_free(single);
}

/**
 * dma_bounce_single_map - map a buffer by pages of its own
 * @pool: the pool of the device's domain
 * @mask: what the device can address
 * @phys: the buffer
 * @size: its bytes
 * @dir: direction of the transfer
 * @attrs: attributes of the mapping
 *
 * Return: the address for the device, which has the buffer's offset in its page, or
 * DMA_MAPPING_ERROR if there is not enough memory.
 */
dma_addr_t dma_bounce_single_map(struct dma_bounce_pool *pool, u64 mask, phys_addr_t phys,
				 size_t size, enum dma_data_direction dir, unsigned long attrs)
{
	int prot = IOMMU_CACHE | (dir == DMA_FROM_DEVICE ? 0 : IOMMU_READ) |
		   (dir == DMA_TO_DEVICE ? 0 : IOMMU_WRITE);
	unsigned int offset = offset_in_page(phys);
	struct single_use *single;
	void *pages;

	if (size > SZ_1G)
		return DMA_MAPPING_ERROR;
	single = kzalloc(sizeof(*single), GFP_ATOMIC | __GFP_NOWARN);
	if (!single)
		return DMA_MAPPING_ERROR;
	single->order = get_order(offset + size);
	pages = (void *)__get_free_pages(GFP_ATOMIC | __GFP_ZERO | __GFP_NOWARN, single->order);
	if (!pages) {
		kfree(single);
		return DMA_MAPPING_ERROR;
	}
	single->va = pages + offset;
	single->phys = phys;
	single->len = size;
	single->read_only = dir == DMA_TO_DEVICE;
	dma_bounce_copy(single->va, phys, size, true);
	if (single_map_iova(pool, mask, single, prot)) {
		single_free(single);
		return DMA_MAPPING_ERROR;
	}
	if (single_insert(pool, single)) {
		single_unmap_iova(pool, single);
		return DMA_MAPPING_ERROR;
	}
	atomic_inc(&pool->nsingle_use);
	dma_bounce_count(pool, DMA_BOUNCE_SINGLE_USE, 1);
	dma_bounce_count(pool, DMA_BOUNCE_BYTES_IN, size);
	return single->addr;
}

static struct single_use *single_find(struct dma_bounce_pool *pool, dma_addr_t addr)
{
	/* One that was mapped is counted: whoever has its address sees that. */
	if (!atomic_read(&pool->nsingle_use))
		return NULL;
	return xa_load(&pool->single_use, addr >> PAGE_SHIFT);
}

/**
 * dma_bounce_single_unmap - unmap a buffer that has pages of its own
 * @pool: the pool of the device's domain
 * @addr: what mapping it returned
 * @attrs: attributes of the unmapping
 *
 * Return: false if @addr is no such address.
 */
bool dma_bounce_single_unmap(struct dma_bounce_pool *pool, dma_addr_t addr, unsigned long attrs)
{
	struct single_use *single = single_find(pool, addr);

	if (!single)
		return false;
	if (WARN_ON_ONCE(addr != single->addr))
		return true;
	single_erase(pool, single);
	atomic_dec(&pool->nsingle_use);
	if (!single->read_only && !(attrs & DMA_ATTR_SKIP_CPU_SYNC)) {
		dma_bounce_copy(single->va, single->phys, single->len, false);
		dma_bounce_count(pool, DMA_BOUNCE_BYTES_OUT, single->len);
	}
	single_unmap_iova(pool, single);
	return true;
}

/**
 * dma_bounce_single_sync - synchronise part of a buffer that has pages of its own
 * @pool: the pool of the device's domain
 * @addr: where in the mapping the part starts
 * @size: its bytes
 * @dir: direction of the transfers that the call is about
 * @for_device: the device gets it; otherwise the CPU
 *
 * Return: false if @addr is no such address.
 */
bool dma_bounce_single_sync(struct dma_bounce_pool *pool, dma_addr_t addr, size_t size,
			    enum dma_data_direction dir, bool for_device)
{
	struct single_use *single = single_find(pool, addr);
	size_t skip;

	if (!single)
		return false;
	skip = addr - single->addr;
	if (WARN_ON_ONCE(addr < single->addr || skip > single->len || size > single->len - skip))
		return true;
	if (dma_bounce_sync_copies(dir, for_device) && (for_device || !single->read_only))
		dma_bounce_copy(single->va + skip, single->phys + skip, size, for_device);
	return true;
}

/**
 * dma_bounce_single_free_all - free what is still mapped when the domain goes
 * @pool: its pool
 */
void dma_bounce_single_free_all(struct dma_bounce_pool *pool)
{
	struct single_use *single;
	unsigned long index;

	xa_for_each(&pool->single_use, index, single) {
		single_erase(pool, single);
		single_unmap_iova(pool, single);
	}
	xa_destroy(&pool->single_use);
}
