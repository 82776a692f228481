BEGIN TRANSACTION;
CREATE TABLE meta (
	schema INTEGER NOT NULL
);
INSERT INTO "meta" VALUES(1);
CREATE TABLE rounds (
	run VARCHAR(64) NOT NULL,
	round INTEGER NOT NULL,
	attempt INTEGER NOT NULL,
	size INTEGER NOT NULL,
	quorum INTEGER NOT NULL,
	opened_at FLOAT NOT NULL,
	closed_at FLOAT,
	state VARCHAR(64),
	complete BOOLEAN,
	abandoned VARCHAR,
	scored BOOLEAN NOT NULL,
	PRIMARY KEY (run, round, attempt)
);
INSERT INTO "rounds" VALUES('last',0,1,1,1,1009.0,1011.0,'de8f3fcf327eb911b2c368e011e0ffdee22fed456b4f4508337018ba46a0639d',1,NULL,0);
INSERT INTO "rounds" VALUES('last',1,1,2,2,1012.0,1014.0,NULL,NULL,'1 of 2 updates',0);
INSERT INTO "rounds" VALUES('last',1,2,2,1,1015.0,1020.0,'769bd2df75df5b1b04756fd81f6fb4d6a88a62cc3c8787e7db30d344316e3ea5',1,NULL,1);
INSERT INTO "rounds" VALUES('last',2,1,2,1,1021.0,NULL,NULL,NULL,NULL,0);
CREATE TABLE runs (
	run VARCHAR(64) NOT NULL,
	fingerprint VARCHAR(64) NOT NULL,
	recipe VARCHAR NOT NULL,
	began_at FLOAT NOT NULL,
	ended_at FLOAT,
	failed BOOLEAN,
	reason VARCHAR,
	PRIMARY KEY (run)
);
INSERT INTO "runs" VALUES('zeta','1d9f07f66babaaad06f02fd8b787a5f358605518964e926bdf83d9aaae36eb05','{"name": "zeta"}',1002.0,1006.0,0,'completed');
INSERT INTO "runs" VALUES('alpha','644a9bc57c6063e2ba4028fa73ed585170ae7db8ac7723d32be49c021a0225f5','{"name": "alpha"}',1003.0,1007.0,1,'the site''s model is unusable');
INSERT INTO "runs" VALUES('mid','40a11c3d699075c2a4c68bd88fa8695829b85e18e06d9e39e5b369b0565c9a75','{"name": "mid"}',1004.0,1008.0,0,'stopped by the operator');
INSERT INTO "runs" VALUES('last','7f454df8a517b750712dd7fea776ebd65a9e3703a8b99088e5fd9abb948cee2a','{"name": "last"}',1005.0,NULL,NULL,NULL);
CREATE TABLE scores (
	run VARCHAR(64) NOT NULL,
	round INTEGER NOT NULL,
	site VARCHAR(64) NOT NULL,
	name VARCHAR(64) NOT NULL,
	value FLOAT NOT NULL,
	PRIMARY KEY (run, round, site, name)
);
INSERT INTO "scores" VALUES('last',1,'bob','accuracy',0.25);
INSERT INTO "scores" VALUES('last',1,'bob','loss',1.5);
INSERT INTO "scores" VALUES('last',1,'eva','accuracy',0.25);
INSERT INTO "scores" VALUES('last',1,'eva','loss',1.5);
CREATE TABLE sites (
	site VARCHAR(64) NOT NULL,
	roles JSON NOT NULL,
	PRIMARY KEY (site)
);
INSERT INTO "sites" VALUES('eva','["evaluator"]');
INSERT INTO "sites" VALUES('ann','["trainer"]');
INSERT INTO "sites" VALUES('bob','["trainer", "evaluator"]');
CREATE TABLE tasks (
	nonce VARCHAR(64) NOT NULL,
	run VARCHAR(64) NOT NULL,
	round INTEGER NOT NULL,
	attempt INTEGER NOT NULL,
	site VARCHAR(64) NOT NULL,
	kind VARCHAR(16) NOT NULL,
	base VARCHAR(64),
	base_bytes INTEGER NOT NULL,
	fate VARCHAR(16) NOT NULL,
	reason VARCHAR NOT NULL,
	PRIMARY KEY (nonce)
);
INSERT INTO "tasks" VALUES('last-0-1-eva-initialise','last',0,1,'eva','initialise',NULL,0,'reported','');
INSERT INTO "tasks" VALUES('last-1-1-ann-fit','last',1,1,'ann','fit','de8f3fcf327eb911b2c368e011e0ffdee22fed456b4f4508337018ba46a0639d',4,'reported','');
INSERT INTO "tasks" VALUES('last-1-1-bob-fit','last',1,1,'bob','fit','de8f3fcf327eb911b2c368e011e0ffdee22fed456b4f4508337018ba46a0639d',4,'late','');
INSERT INTO "tasks" VALUES('last-1-2-ann-fit','last',1,2,'ann','fit','de8f3fcf327eb911b2c368e011e0ffdee22fed456b4f4508337018ba46a0639d',4,'reported','');
INSERT INTO "tasks" VALUES('last-1-2-bob-fit','last',1,2,'bob','fit','de8f3fcf327eb911b2c368e011e0ffdee22fed456b4f4508337018ba46a0639d',4,'reported','');
INSERT INTO "tasks" VALUES('last-1-2-bob-score','last',1,2,'bob','score','769bd2df75df5b1b04756fd81f6fb4d6a88a62cc3c8787e7db30d344316e3ea5',4,'reported','');
INSERT INTO "tasks" VALUES('last-1-2-eva-score','last',1,2,'eva','score','769bd2df75df5b1b04756fd81f6fb4d6a88a62cc3c8787e7db30d344316e3ea5',4,'reported','');
INSERT INTO "tasks" VALUES('last-2-1-ann-fit','last',2,1,'ann','fit','769bd2df75df5b1b04756fd81f6fb4d6a88a62cc3c8787e7db30d344316e3ea5',4,'started','');
INSERT INTO "tasks" VALUES('last-2-1-bob-fit','last',2,1,'bob','fit','769bd2df75df5b1b04756fd81f6fb4d6a88a62cc3c8787e7db30d344316e3ea5',4,'invited','');
CREATE TABLE updates (
	id INTEGER NOT NULL,
	run VARCHAR(64) NOT NULL,
	round INTEGER NOT NULL,
	attempt INTEGER NOT NULL,
	site VARCHAR(64) NOT NULL,
	nonce VARCHAR(64) NOT NULL,
	verdict VARCHAR(16) NOT NULL,
	reason VARCHAR NOT NULL,
	digest VARCHAR(64) NOT NULL,
	bytes INTEGER NOT NULL,
	metrics JSON NOT NULL,
	weight FLOAT,
	seal VARCHAR(64) NOT NULL,
	at FLOAT NOT NULL,
	PRIMARY KEY (id)
);
INSERT INTO "updates" VALUES(1,'last',0,1,'eva','last-0-1-eva-initialise','accepted','','b690dd4b190c86e4b4a62928d4094a94af756e9f2998dcc31d9a2ea819274613',4,'{"loss": 0.5}',12.0,'6f190cf3436a9a89e920244c601748bcc7511f2851ff1ba57649ab31612aa7df',1010.0);
INSERT INTO "updates" VALUES(2,'last',1,1,'ann','last-1-1-ann-fit','accepted','','135e48e7e8a6c46c54b691dc13e3ce20b8426755ed52ad5f93ebb4b66215b318',1,'{"loss": 0.5}',12.0,'18643c72860c4d44be0cd78cef3ef1c5ccbadf47b364bf38bfec9a8d7ae3b320',1013.0);
INSERT INTO "updates" VALUES(3,'last',1,2,'bob','last-1-2-bob-fit','invalid','body: ''conv.weight'' has values that are not finite','3ae7d805f6789a6402acb70ad4096a85a56bf6804eaf25c0493ac697548d30b5',1,'{"loss": 0.5}',12.0,'60bb5403fe50697f42247c24aa9efb5d75f13a6e346231a727333b3e13f1e308',1016.0);
INSERT INTO "updates" VALUES(4,'last',1,2,'ann','last-1-2-ann-fit','accepted','','08112a9e334ce73042b531c25668cf5cb12a1ee040a4326afeac065461079a06',1,'{"loss": 0.5}',12.0,'74b4135cb37929a3aeb8fac825d35d4f7551a66a5663cf4e82fdce9c0e46bea7',1017.0);
INSERT INTO "updates" VALUES(5,'last',1,2,'bob','last-1-2-bob-fit','accepted','','1104908ab930e671002c7cd7f3fc921570b1bf64ecfa12fe363585c630eaca6b',1,'{"loss": 0.5}',12.0,'cb03903006227f5a9bec11911945437ddc5ffcf737263af8210ffeeadcdcb058',1018.0);
INSERT INTO "updates" VALUES(6,'last',1,2,'bob','last-1-2-bob-fit','stale','late','f2f21520bebe5d07c6813b972de3617a0a0d50a36be3784e9fece54cff8d8032',1,'{"loss": 0.5}',12.0,'2d2eeb9295b8605ca2ed397bbd647f52b4bf81d6d28dc031443ef6217a48d69e',1019.0);
CREATE INDEX tasks_of_round ON tasks (run, round);
CREATE INDEX updates_of_round ON updates (run, round);
CREATE UNIQUE INDEX one_update_a_task ON updates (nonce) WHERE verdict = 'accepted';
COMMIT;
