/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * QEMU's edu device, and memory to map for it. The device shows which bytes DMA reads and writes.
 */
#ifndef _DMA_BOUNCE_TEST_EDU_H
#define _DMA_BOUNCE_TEST_EDU_H

#include <linux/dma-direction.h>
#include <linux/scatterlist.h>
#include <linux/sizes.h>
#include <linux/types.h>

#include "dma-bounce-types.h"

/* Size in bytes of the device's own buffer, and of the memory to map */
#define EDU_BUFFER_SIZE	4096
#define AREA_SIZE	SZ_64K
/* Pieces of the list. Each piece starts at the page offset at which the piece before it ends. */
#define PIECES		4

/**
 * struct edu - the device, and its memory
 * @dev:	the device
 * @pool:	the pool of the device's domain
 * @regs:	registers of the device
 * @area:	memory to map
 * @expect:	expected contents of @area
 * @seen:	coherent memory for the contents of the device's buffer
 * @seen_dma:	DMA address of @seen
 * @sgl:	the list
 * @seed:	seed of the patterns
 */
struct edu {
	struct device		*dev;
	struct dma_bounce_pool	*pool;
	void __iomem		*regs;
	u8			*area;
	u8			*expect;
	u8			*seen;
	dma_addr_t		seen_dma;
	struct scatterlist	sgl[PIECES];
	u8			seed;
};

/* True if @cond is false. Then also reports the condition. */
#define FAILS(cond) edu_report_if(!(cond), __func__, __LINE__, #cond)

bool edu_report_if(bool failed, const char *func, int line, const char *cond);
int edu_transfer(struct edu *edu, dma_addr_t addr, unsigned int offset, unsigned int len,
		 bool to_ram);
int edu_reads(struct edu *edu, dma_addr_t addr, unsigned int len);
int edu_writes(struct edu *edu, dma_addr_t addr, unsigned int len, u8 *copy);
void edu_fill(struct edu *edu);
bool edu_area_as_expected(struct edu *edu);
dma_addr_t edu_map(struct edu *edu, unsigned int offset, size_t len, enum dma_data_direction dir,
		   unsigned long attrs);
void edu_unmap(struct edu *edu, dma_addr_t addr, size_t len, enum dma_data_direction dir,
	       unsigned long attrs);
int edu_bounced_soon(struct edu *edu, size_t len, enum dma_data_direction dir);

#endif /* _DMA_BOUNCE_TEST_EDU_H */
